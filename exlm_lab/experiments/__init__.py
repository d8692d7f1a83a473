"""The sweeps and the study: cells of settings, what is measured of each, tables and figures."""
