//! Thin bindings to PJRT plugins: only what this crate uses, safe to call, errors as values.
//!
//! A [`Plugin`] is loaded from a file that [`find()`] names. A [`Client`] has devices, compiles StableHLO text and
//! runs it; a [`Topology`] compiles for a slice that isn't here. Tried with interface versions 0.81 (xla_cpu_pjrt
//! 0.0.1), 0.115 (lammps_jax_pjrt_cpu 0.11.2) and 0.117 (libtpu 0.0.52).

mod client;
mod element;
mod error;
mod executable;
mod find;
mod plugin;
pub(crate) mod proto;
mod sys;
mod topology;
mod value;

pub(crate) use client::VIEW_ALIGNMENT;
pub use client::{Buffer, Client, Device, Event, OnReady};
pub use element::Element;
pub use error::{Code, PjrtError};
pub use executable::{CompileOptions, Executable, Launch, Loaded, MemoryStats};
pub use find::{Want, find};
pub use plugin::{OLDEST_MINOR, Plugin};
pub use topology::{DeviceDescription, Topology};
pub use value::Value;
