"""Property tests here are cut off by pytest's limit alone."""

from hypothesis import settings

# A fifth of a second for an example is little when other work shares the machine.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
