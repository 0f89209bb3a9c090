"""The ``fit`` command. Its start imports no torch."""
