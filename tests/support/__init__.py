"""Models, data, witnesses and runners that tests of several rooms use."""
