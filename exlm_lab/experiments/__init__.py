"""The sweeps of chapter 13: cells of settings, what is measured of each, tables and figures."""
