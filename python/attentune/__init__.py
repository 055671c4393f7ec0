"""Generate, tune, store and ship attention kernels for Apache TVM."""
