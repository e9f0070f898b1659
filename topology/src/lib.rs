//! Pure model of TPU slices. No I/O, no async, no clock.
//!
//! A [`Slice`] is parsed from a name as users write it; its [`Device`]s carry libtpu's ids, coordinates and process
//! indices, in libtpu's list order. A *rank* is a position in that list. On a slice,
//! [`group::classify`] says what shape a set of ranks has, [`ring::ring_order`] walks it, [`cover::cover`] completes it
//! to the replica groups that libtpu needs, [`cost::predict`] says how long a collective takes on it, and
//! [`mesh::assign`] lays a logical mesh over the devices so that the axes that talk most get the best links.
//!
//! Units: bytes, microseconds and bytes per second, unless a name says otherwise.

pub mod constants;
pub mod cost;
pub mod cover;
pub mod draw;
mod error;
mod generation;
pub mod group;
pub mod link;
mod loads;
pub mod mesh;
mod name;
pub mod ring;
mod seen;
mod shapes;
mod slice;

pub use error::TopologyError;
pub use generation::{Generation, WrapRule};
pub use name::{SliceOptions, from_accelerator, parse, parse_with};
pub use seen::seen;
pub use slice::{ChipConfig, Device, Shape, Slice};
