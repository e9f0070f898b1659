//! What a collective asks for, as plain data that every engine speaks.
//!
//! Pure: no I/O, no clock, no thread. A [`Collective`] names an operation, its element type, its reduction and the
//! memory it reads and writes; [`Collective::validate`] refuses what can't run before a byte moves;
//! [`Collective::fingerprint`] is what ranks compare to find out that they called different things.

pub mod dtype;
mod keep;
pub mod layout;
pub mod op;
pub mod reduction;
mod validate;

pub use dtype::DType;
pub use keep::Keep;
pub use layout::{Layout, MAX_DIMS};
pub use op::{Blocks, Collective, Kind, Part, Tensor};
pub use reduction::Reduction;
pub use validate::Invalid;
