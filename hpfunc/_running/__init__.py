"""The runtime of a step on one rank: sessions, drivers, collectives, and agreement between ranks."""
