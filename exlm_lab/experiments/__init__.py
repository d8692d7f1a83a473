"""The sweeps and the study: what is trained, what is measured, and the tables and figures."""
