//! What is cached where: prompt -> for each instance, how many leading blocks it holds.
pub mod hash;
pub mod index;
pub mod keys;
pub(crate) mod names;
mod table;
