"""Formats of other programs: what products export, and trajectories that other agents write."""
