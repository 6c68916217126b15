"""How processes find each other, and know who is there, who waits and who has failed."""
