"""Open-loop load tests of the gateway and its rivals, side by side. Start with README.md."""
