"""Sources of events that are not our runtime, one file each."""
