//! `Buckets`: the counts of a histogram.
use pyo3::prelude::*;

/// Counts of values in buckets. `bounds`: upper bounds, inclusive and ascending; a further bucket
/// has the values above the last one.
#[pyclass(subclass, module = "lmetric._core")]
struct Buckets {
    bounds: Vec<f64>,
    counts: Vec<u64>,
    #[pyo3(get)]
    sum: f64,
}

#[pymethods]
impl Buckets {
    #[new]
    fn new(bounds: Vec<f64>) -> Self {
        let counts = vec![0; bounds.len() + 1];
        Self { bounds, counts, sum: 0.0 }
    }

    /// Adds a value.
    fn observe(&mut self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket] += 1;
        self.sum += value;
    }

    /// The number of values in each bucket.
    #[getter]
    fn counts(&self) -> Vec<u64> {
        self.counts.clone()
    }
}

/// Adds the class to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Buckets>()
}
