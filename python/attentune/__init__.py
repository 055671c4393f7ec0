"""Generate, tune, store and ship attention kernels for Apache TVM."""

from attentune import errors, reference
from attentune.api import attention, build, export_library, load_library, plan, tune
from attentune.database import Database
from attentune.key import AttentionKey
from attentune.problem import AttentionProblem
from attentune.record import Record
from attentune.search.remote import Tracker
from attentune.target import Target

__all__ = [
    "AttentionKey",
    "AttentionProblem",
    "Database",
    "Record",
    "Target",
    "Tracker",
    "attention",
    "build",
    "errors",
    "export_library",
    "load_library",
    "plan",
    "reference",
    "tune",
]
