"""Groups of particles as arrays, for sequential Monte Carlo."""
