"""How a step runs on one rank: who does what next, and with whom it is agreed, sent and compared."""
