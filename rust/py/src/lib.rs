//! `lmetric._core`: the Python module of the core. Converts and exposes, decides nothing.
use pyo3::prelude::*;

mod admission;
mod api;
mod board;
mod buckets;
mod budget;
mod buffers;
mod encode_load;
mod errors;
mod expr;
mod feed;
mod forecast;
mod guard;
mod held;
mod lab;
mod peers;
mod policies;
mod priorities;
mod programs;
mod rebalance;
mod records;
mod registry;
mod request;
mod router;
mod settings;
mod split;
mod steps;
mod ticket;
mod tokens;
mod warm;
mod wire;

// Free-threaded interpreters must enable their lock: only that lock makes reading buffers in place
// sound (see `buffers`).
#[pymodule(gil_used = true)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    errors::register(module)?;
    router::register(module)?;
    peers::register(module)?;
    encode_load::register(module)?;
    admission::register(module)?;
    board::register(module)?;
    buckets::register(module)?;
    budget::register(module)?;
    feed::register(module)?;
    expr::register(module)?;
    wire::register(module)?;
    api::register(module)?;
    records::register(module)?;
    tokens::register(module)?;
    steps::register(module)?;
    warm::register(module)?;
    lab::register(module)
}
