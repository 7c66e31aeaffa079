"""Training of length predictors (STAR, section 4): samples, a network, and baselines."""
