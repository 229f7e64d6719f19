"""Readouts: draws, scores and other functions of rows, computed on the rows' device."""
