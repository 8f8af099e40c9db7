"""Many training runs as one experiment: each resumable and in a process of its own, judged, and kept small."""

from __future__ import annotations
