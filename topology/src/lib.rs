//! Pure model of TPU slices. No I/O, no async, no clock.
