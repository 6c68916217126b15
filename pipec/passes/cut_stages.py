"""Give every node the stage that runs it, so that the slowest stage is as fast as possible."""
