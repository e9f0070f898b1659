//! The loops over elements: reduce, copy, pack and unpack. Pure, allocate nothing, and take memory at any alignment.
//!
//! Every loop is plain Rust that the compiler vectorises, compiled for several levels of the instruction set; the level
//! is picked for the CPU at hand on the first call. All levels give the same bits: nothing is contracted to fused
//! multiply-adds, nothing is reassociated, and NaNs are written in one canonical form. (A thread that has switched on
//! flush-to-zero, as `torch.set_flush_denormal` does, gets flushed subnormals: the kernels leave the mode alone.)

mod copy;
mod element;
#[cfg(test)]
mod levels;
mod narrow;
mod reduce;
mod strided;

pub use copy::copy;
pub use reduce::{Source, Target, reduce};
pub use strided::{pack, unpack};
