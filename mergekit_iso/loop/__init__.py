"""Merge operators as the outer step of DiLoCo: one worker per process, or all in one."""

from .looped import LoopedMerger
from .report import OuterReport
from .settings import LoopSettings
from .simulate import Simulation, simulate

__all__ = ["LoopSettings", "LoopedMerger", "OuterReport", "Simulation", "simulate"]
