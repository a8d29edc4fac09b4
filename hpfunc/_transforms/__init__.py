"""What a step calls: arrays are cut and put together, differentiated, and stepped through by plans."""
