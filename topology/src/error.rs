//! What can be wrong with a question about a slice. Data first; the sentences are only renderings of it.

use crate::slice::Shape;

/// Every error of this crate. Where a nearby valid choice exists, the error carries it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// The text is not a slice name in any of the accepted forms.
    #[error("\"{name}\" is not a slice name: {expected}")]
    BadName {
        /// The text that came.
        name: String,
        /// What the part at fault should have looked like.
        expected: String,
    },
    /// Devices that are no slice.
    #[error("{devices} devices of kind \"{kind}\" are no slice: {why}")]
    NoSlice {
        /// What they say that they are.
        kind: String,
        /// How many there are.
        devices: usize,
        /// Why not.
        why: &'static str,
    },
    /// No such TPU generation.
    #[error("unknown TPU generation \"{name}\"; known: {}; nearest: {nearest}", known.join(", "))]
    UnknownGeneration {
        /// The generation that came.
        name: String,
        /// Every generation name.
        known: Vec<&'static str>,
        /// The known name with the smallest edit distance.
        nearest: &'static str,
    },
    /// The generation has no slice of this shape.
    #[error("{generation} has no {shape} slice: {reason}; nearest: {}", nearest.join(", "))]
    BadShape {
        /// Generation name.
        generation: &'static str,
        /// The shape that came.
        shape: Shape,
        /// Which rule it breaks.
        reason: String,
        /// The closest slice names that exist.
        nearest: Vec<String>,
    },
    /// The chips do not divide by the chips of a host.
    #[error("{generation}:{shape} is not divisible by the {bounds} chips of a host; nearest: {}", nearest.join(", "))]
    HostsDontDivide {
        /// Generation name.
        generation: &'static str,
        /// The shape that came.
        shape: Shape,
        /// Chips per host along x, y, z.
        bounds: Shape,
        /// The closest slice names that divide.
        nearest: Vec<String>,
    },
    /// Host bounds with a zero in them.
    #[error("chips per host bounds {bounds} must all be positive; the default for {generation} is {default}")]
    BadHostBounds {
        /// Generation name.
        generation: &'static str,
        /// The bounds that came.
        bounds: Shape,
        /// The bounds that libtpu uses by default.
        default: Shape,
    },
    /// Not a device count that an accelerator type of the generation can carry.
    #[error("accelerator type \"{accelerator}\" counts {unit}; no {generation} slice has {count}; nearest: {}", nearest.join(", "))]
    BadCount {
        /// The type that came.
        accelerator: String,
        /// Generation name.
        generation: &'static str,
        /// What the number counts: "TensorCores" or "chips".
        unit: &'static str,
        /// The number that came.
        count: u64,
        /// The closest accelerator types that exist.
        nearest: Vec<String>,
    },
    /// The generation is named by topology, not by a count.
    #[error("{generation} is named by topology, not by a count as in \"{accelerator}\"; nearest: {}", nearest.join(", "))]
    NamedByTopology {
        /// The type that came.
        accelerator: String,
        /// Generation name.
        generation: &'static str,
        /// Names to use instead.
        nearest: Vec<String>,
    },
    /// An accelerator type and a topology that cannot both be true.
    #[error(
        "accelerator type \"{accelerator}\" has {accelerator_chips} chips but topology \"{topology}\" has \
         {topology_chips}; topologies that fit the type: {}; types that fit the topology: {}",
        fitting_topologies.join(", "), fitting_types.join(", ")
    )]
    Contradiction {
        /// The type that came.
        accelerator: String,
        /// Chips it stands for.
        accelerator_chips: u64,
        /// The topology that came.
        topology: String,
        /// Chips it stands for.
        topology_chips: u64,
        /// Shapes of the type's chip count.
        fitting_topologies: Vec<String>,
        /// Types of the topology's chip count.
        fitting_types: Vec<String>,
    },
    /// An accelerator type and a topology of different generations.
    #[error(
        "accelerator type \"{accelerator}\" is a {accelerator_generation} but topology \"{topology}\" is a {topology_generation}"
    )]
    GenerationMismatch {
        /// The type that came.
        accelerator: String,
        /// Its generation.
        accelerator_generation: &'static str,
        /// The topology that came.
        topology: String,
        /// Its generation.
        topology_generation: &'static str,
    },
    /// A generation and a chip configuration that don't go together.
    #[error("{generation} has no chip configuration \"{config}\"; valid: {}", valid.join(", "))]
    BadChipConfig {
        /// Generation name.
        generation: &'static str,
        /// The configuration that came.
        config: String,
        /// Configurations of the generation.
        valid: Vec<&'static str>,
    },
    /// A twist that the shape can't have.
    #[error("{generation}:{shape} cannot be twisted: {reason}; nearest twisted: {}", nearest.join(", "))]
    BadTwist {
        /// Generation name.
        generation: &'static str,
        /// The shape that came.
        shape: Shape,
        /// Which rule it breaks.
        reason: &'static str,
        /// The closest twisted slices.
        nearest: Vec<String>,
    },
    /// Slices were asked for in a number that makes no sense.
    #[error("\"{name}\" asks for {count} slices; the number of slices is 1 to {max}")]
    BadSliceCount {
        /// The name that came.
        name: String,
        /// The count that came.
        count: u64,
        /// The largest count.
        max: u32,
    },
    /// A mesh without axes, or an axis of size zero or less.
    #[error("mesh axis \"{name}\" has size {size}; sizes are 1 or more")]
    BadAxisSize {
        /// Axis name.
        name: String,
        /// The size that came.
        size: i64,
    },
    /// Two mesh axes of one name.
    #[error("mesh axis \"{name}\" is named twice")]
    DuplicateAxis {
        /// The name.
        name: String,
    },
    /// An option names an axis that the mesh doesn't have.
    #[error("no mesh axis \"{name}\"; the axes are {}", axes.join(", "))]
    UnknownAxis {
        /// The name that came.
        name: String,
        /// The axes there are.
        axes: Vec<String>,
    },
    /// An axis weight that is not a positive finite number.
    #[error("traffic of mesh axis \"{name}\" is {value}; it must be a finite number, 0 or more")]
    BadTraffic {
        /// Axis name.
        name: String,
        /// What came.
        value: String,
    },
    /// The mesh's sizes don't multiply to the devices.
    #[error("mesh {mesh} has {product} places for {devices} devices; nearest meshes that fit: {}", nearest.join(", "))]
    MeshSize {
        /// The mesh as `name=size,…`.
        mesh: String,
        /// Product of the sizes.
        product: u64,
        /// Devices of the slice(s).
        devices: u64,
        /// Meshes with one size changed so that they fit.
        nearest: Vec<String>,
    },
    /// The number of slices can't be shared out over the mesh axes as asked.
    #[error("{slices} slices cannot be laid along {axes}: {reason}")]
    DcnAxes {
        /// Number of slices.
        slices: u32,
        /// The axes in question as `name=size,…`.
        axes: String,
        /// Why not.
        reason: &'static str,
    },
    /// A rank that the slice doesn't have.
    #[error("rank {rank} is outside the {devices} devices")]
    RankOutOfRange {
        /// The rank.
        rank: u64,
        /// Number of devices.
        devices: u64,
    },
    /// A rank that appears more than once.
    #[error("rank {rank} appears more than once")]
    DuplicateRank {
        /// The rank.
        rank: u32,
    },
    /// A device id that the slice doesn't have.
    #[error("device id {id} is not in the slice")]
    UnknownDevice {
        /// The id.
        id: u64,
    },
    /// A group without ranks.
    #[error("the group is empty")]
    EmptyGroup,
    /// Replica groups of unequal sizes: libtpu refuses them.
    #[error("replica groups must be of equal size: group {index} has {size} ranks, group 0 has {first}")]
    UnequalGroups {
        /// Index of the first group that differs.
        index: usize,
        /// Its size.
        size: usize,
        /// Size of group 0.
        first: usize,
    },
    /// The rest of the devices can't be cut into groups of the given size.
    #[error("groups of {size} cannot cover {devices} devices: {devices} is not a multiple of {size}")]
    NoCover {
        /// Ranks per group.
        size: usize,
        /// Devices to cover.
        devices: usize,
    },
}
