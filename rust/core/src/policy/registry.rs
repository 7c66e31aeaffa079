//! Names to policies: one line each.
