"""Pure functions from a trace to results: columns in, frozen dataclasses out.

:func:`report` runs the whole analysis; the modules hold its parts. Nothing here prints, draws or touches a device.
"""

from __future__ import annotations

from cudatool.analyze.calls import AllocatorCall, Change, Verb
from cudatool.analyze.categories import RULES, Categories, Category, CategoryRule, CategoryShare, categorize
from cudatool.analyze.diagnosis import Diagnosis, Remedy, Topic, advice, diagnose
from cudatool.analyze.diff import Diff, DiffRow, Match, diff
from cudatool.analyze.failure import Failure, Shortage, failure
from cudatool.analyze.fragmentation import (
    Cause,
    CauseShare,
    Fragmentation,
    Hole,
    Pin,
    Wanted,
    fragmentation,
    fragmentation_at,
)
from cudatool.analyze.leak_verdicts import Doubt, Leak, Leaks, LeakVerdict
from cudatool.analyze.leaks import leaks, leaks_of, pinned_leaks
from cudatool.analyze.lint import LintFinding, Severity, lint
from cudatool.analyze.modules import ModuleMemory, Modules, WithoutModule, WithoutModuleShare, merged_layers
from cudatool.analyze.outside import DeviceUse, FreeReading, Outside, device_use, outside
from cudatool.analyze.ranges import Ranges, ranges
from cudatool.analyze.recorded import recorded_settings, torch_settings
from cudatool.analyze.replay import ReplayCheck, check
from cudatool.analyze.replay_pass import Divergence
from cudatool.analyze.report import MemoryReport, report
from cudatool.analyze.requests import Requests, requests
from cudatool.analyze.settings_advice import Advice, LeftOut, NoAdvice, Record
from cudatool.analyze.sites import Grouping, SiteTree, range_at, site_tree
from cudatool.analyze.steps import Confidence, Steps, find_steps
from cudatool.analyze.usage import Usage, is_private_pool, pool_label, usage_by_pool, usage_by_stream
from cudatool.analyze.whatif import advise, recorded_limit, what_if
from cudatool.analyze.whatif_model import Caveat, OutOfMemory, WhatIfOutcome
from cudatool.overview.compiled import (
    Compiled,
    GeneratedShare,
    Unattributed,
    UnattributedShare,
    compiled_sites,
)
from cudatool.overview.execution import (
    Copies,
    KernelTotal,
    Operations,
    Stream,
    calls,
    copies,
    kernels,
    operations,
    streams,
)
from cudatool.overview.ledger import Holder, Ledger, LedgerLine, ledger
from cudatool.overview.library_blocks import LibraryBlocks, LibrarySite, library_blocks
from cudatool.overview.moments import (
    Block,
    CallSite,
    Layout,
    Segment,
    before_recording,
    by_call_site,
    index_at,
    layout_at,
    segments_at,
    site_keys,
    site_labels,
    torch_segments,
    without_stack,
)
from cudatool.overview.pinned import PinnedHolders, PinnedSite, pinned_holders
from cudatool.overview.plans import FusedKernel, FusedOperation, MemoryPlan, PlannedBuffer, plans
from cudatool.overview.summary import DeviceMemory, Moment, Summary
from cudatool.trace.lifetimes import Lifetimes, Timeline, blocks, segments, timeline
from cudatool.trace.model import recorded_from
from cudatool.trace.module_tensors import BlockModules, block_modules
from cudatool.trace.window import window

__all__ = [
    "RULES",
    "Advice",
    "AllocatorCall",
    "Block",
    "BlockModules",
    "CallSite",
    "Categories",
    "Category",
    "CategoryRule",
    "CategoryShare",
    "Cause",
    "CauseShare",
    "Caveat",
    "Change",
    "Compiled",
    "Confidence",
    "Copies",
    "DeviceMemory",
    "DeviceUse",
    "Diagnosis",
    "Diff",
    "DiffRow",
    "Divergence",
    "Doubt",
    "Failure",
    "Fragmentation",
    "FreeReading",
    "FusedKernel",
    "FusedOperation",
    "GeneratedShare",
    "Grouping",
    "Holder",
    "Hole",
    "KernelTotal",
    "Layout",
    "Leak",
    "LeakVerdict",
    "Leaks",
    "Ledger",
    "LedgerLine",
    "LeftOut",
    "LibraryBlocks",
    "LibrarySite",
    "Lifetimes",
    "LintFinding",
    "Match",
    "MemoryPlan",
    "MemoryReport",
    "ModuleMemory",
    "Modules",
    "Moment",
    "NoAdvice",
    "Operations",
    "OutOfMemory",
    "Outside",
    "Pin",
    "PinnedHolders",
    "PinnedSite",
    "PlannedBuffer",
    "Ranges",
    "Record",
    "Remedy",
    "ReplayCheck",
    "Requests",
    "Segment",
    "Severity",
    "Shortage",
    "SiteTree",
    "Steps",
    "Stream",
    "Summary",
    "Timeline",
    "Topic",
    "Unattributed",
    "UnattributedShare",
    "Usage",
    "Verb",
    "Wanted",
    "WhatIfOutcome",
    "WithoutModule",
    "WithoutModuleShare",
    "advice",
    "advise",
    "before_recording",
    "block_modules",
    "blocks",
    "by_call_site",
    "calls",
    "categorize",
    "check",
    "compiled_sites",
    "copies",
    "device_use",
    "diagnose",
    "diff",
    "failure",
    "find_steps",
    "fragmentation",
    "fragmentation_at",
    "index_at",
    "is_private_pool",
    "kernels",
    "layout_at",
    "leaks",
    "leaks_of",
    "ledger",
    "library_blocks",
    "lint",
    "merged_layers",
    "operations",
    "outside",
    "pinned_holders",
    "pinned_leaks",
    "plans",
    "pool_label",
    "range_at",
    "ranges",
    "recorded_from",
    "recorded_limit",
    "recorded_settings",
    "report",
    "requests",
    "segments",
    "segments_at",
    "site_keys",
    "site_labels",
    "site_tree",
    "streams",
    "timeline",
    "torch_segments",
    "torch_settings",
    "usage_by_pool",
    "usage_by_stream",
    "what_if",
    "window",
    "without_stack",
]
