"""Devices, links, topologies and calibration: the figures that turn FLOPs and bytes into seconds.

Read ``devices``, then ``topology``. ``calibration`` measures a device of this machine; only it imports torch.
"""
