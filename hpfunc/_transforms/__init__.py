"""The public transforms: shard and unshard arrays, differentiate a loss, and run a step by a plan."""
