"""Devices, the links between them, topologies, and calibration: what turns FLOPs and bytes into seconds.

Read ``devices``, then ``topology``. ``calibration`` measures the device at hand, and alone imports torch.
"""
