"""Several hosts on one Linux machine, for tests and for the scaling benchmark; see docs/lab.md.

Run from the repository's folder. Needs root; imports nothing of fleetune.
"""

from lab.commands import LabError
from lab.host import Host
from lab.lab import Lab

__all__ = ["Host", "Lab", "LabError"]
