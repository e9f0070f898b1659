//! Collectives of ranks on devices: who is there, what is launched, and when it is done.
//!
//! A [`Machine`] is a client whose devices belong to ranks that are threads of this process. A group's members open it
//! ([`Machine::open`]) and post [`Call`]s; the last member to come launches the program on all the group's devices in
//! one call. What each rank gets back is a [`Ticket`].
//!
//! A rank's inputs are copied to its device when it comes, on its own thread, or lent to it; its results are copied out by
//! whoever waits for them, else by the machine's thread; or they are device buffers already, and stay such.
//!
//! Where each process has one device, as on a TPU, a [`Chip`] takes the machine's place: each rank launches programs on
//! its own device, in the order of its calls.

mod arrival;
mod chip;
mod constants;
mod failure;
mod group;
mod key;
mod launch;
mod launching;
mod machine;
mod order;
mod stage;
mod ticket;

pub use chip::{Chip, ChipOptions, Peers, Seat};
pub use failure::{Called, Failure};
pub use group::{Call, GroupSpec, Member, OpenError};
pub use launching::{Launching, launching};
pub use machine::{Machine, Options};
pub use ticket::{Callback, Runner, State, Ticket, Times, Waited, now};
