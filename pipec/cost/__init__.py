"""What operators cost: symbolic sizes, FLOPs and bytes moved, and the devices that turn them into seconds."""
