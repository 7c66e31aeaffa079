//! What is cached where: prompt -> for each instance, how many leading blocks it holds.
pub mod feeds;
pub mod hash;
pub mod index;
mod table;
