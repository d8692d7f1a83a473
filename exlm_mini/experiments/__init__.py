"""The experiments of the paper at small scale: what is run, what is measured, what came out."""
