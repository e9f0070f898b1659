//! Who takes part in a program.

use std::sync::Arc;

use super::ProgramError;

/// Groups of replicas. All are of one size, and every replica is in exactly one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Groups {
    /// Replica numbers; a member's position in its group is its rank there.
    pub groups: Vec<Vec<u32>>,
    /// How a reduce-scatter of them may be done in steps.
    pub steps: Option<Arc<Steps>>,
}

/// Reduce-scatters that, one after another, are one reduce-scatter over larger groups.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Steps {
    /// The groups of each step, of replicas.
    pub groups: Vec<Vec<Vec<u32>>>,
    /// From whom to whom (replicas) the last block goes; empty if everybody ends with its own.
    pub moves: Vec<(u32, u32)>,
    /// For which bytes of a rank's whole input steps are to be taken: bit n for 2ⁿ to 2ⁿ⁺¹ − 1.
    pub sizes: u64,
}

impl Steps {
    /// Whether an input of as many bytes goes in steps.
    pub fn serve(&self, bytes: u64) -> bool {
        self.sizes >> bytes.max(1).ilog2() & 1 == 1
    }
}

impl Groups {
    /// Checks that the groups are of one size and hold each of 0..replicas once.
    pub fn new(groups: Vec<Vec<u32>>) -> Result<Groups, ProgramError> {
        let size = groups.first().map_or(0, Vec::len);
        if size == 0 || groups.iter().any(|group| group.len() != size) {
            return Err(ProgramError::Groups { reason: "groups must be of one size, one or more" });
        }
        let mut seen = vec![false; groups.len() * size];
        for &member in groups.iter().flatten() {
            match seen.get_mut(member as usize) {
                Some(seen) if !*seen => *seen = true,
                _ => return Err(ProgramError::Groups { reason: "each replica must be in exactly one group" }),
            }
        }
        Ok(Groups { groups, steps: None })
    }

    /// One group of all replicas.
    pub fn all(replicas: u32) -> Groups {
        Groups { groups: vec![(0..replicas.max(1)).collect()], steps: None }
    }

    /// Members of each group.
    pub fn size(&self) -> usize {
        self.groups[0].len()
    }

    /// Replicas of the program.
    pub fn replicas(&self) -> usize {
        self.groups.len() * self.size()
    }

    /// The position of each replica in its group.
    pub(super) fn positions(&self) -> Vec<u32> {
        let mut positions = vec![0; self.replicas()];
        for group in &self.groups {
            for (position, &member) in group.iter().enumerate() {
                positions[member as usize] = position as u32;
            }
        }
        positions
    }

    /// These groups, whose reduce-scatters of `sizes` ([`Steps::sizes`]) go in steps; each step's groups hold every replica once, and every
    /// two members of a group of these meet on exactly one way through the steps (as lines along a box's axes do).
    pub fn in_steps(mut self, steps: Vec<Vec<Vec<u32>>>, sizes: u64) -> Result<Groups, ProgramError> {
        let wrong = ProgramError::Groups { reason: "the steps don't leave each member one block" };
        let (replicas, size) = (self.replicas(), self.size());
        // The first block that a replica holds, and how many.
        let mut first = vec![0usize; replicas];
        let mut held = size;
        for groups in &steps {
            let among = Groups::new(groups.clone())?;
            if among.replicas() != replicas || !held.is_multiple_of(among.size()) {
                return Err(wrong);
            }
            let before = first.clone();
            held /= among.size();
            for group in groups {
                if group.iter().any(|&member| before[member as usize] != before[group[0] as usize]) {
                    return Err(wrong);
                }
                for (part, &member) in group.iter().enumerate() {
                    first[member as usize] += part * held;
                }
            }
        }
        let mut moves = Vec::with_capacity(replicas);
        for group in &self.groups {
            let mut given = vec![false; size];
            for &member in group {
                let block = first[member as usize];
                if std::mem::replace(&mut given[block], true) {
                    return Err(wrong);
                }
                moves.push((member, group[block]));
            }
        }
        if held != 1 {
            return Err(wrong);
        }
        if moves.iter().all(|(from, to)| from == to) {
            moves.clear();
        }
        self.steps = Some(Arc::new(Steps { groups: steps, moves, sizes }));
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(group: &[u32], steps: &[&[&[u32]]]) -> Result<Groups, ProgramError> {
        let steps = steps.iter().map(|step| step.iter().map(|group| group.to_vec()).collect()).collect();
        Groups::new(vec![group.to_vec()])?.in_steps(steps, u64::MAX)
    }

    #[test]
    fn blocks_go_where_they_belong() {
        // Two rows of two: first along columns, then along rows.
        let columns: &[&[u32]] = &[&[0, 2], &[1, 3]];
        let rows: &[&[u32]] = &[&[0, 1], &[2, 3]];
        let found = |group: &[u32], order: &[&[&[u32]]]| steps(group, order).unwrap().steps.unwrap().moves.clone();
        assert_eq!(found(&[0, 1, 2, 3], &[columns, rows]), []);
        // Rows first: member 1 ends with block 2, member 2 with block 1.
        assert_eq!(found(&[0, 1, 2, 3], &[rows, columns]), [(0, 0), (1, 2), (2, 1), (3, 3)]);
        assert_eq!(found(&[3, 1, 2, 0], &[columns, rows]), [(3, 0), (1, 1), (2, 2), (0, 3)]);
    }

    #[test]
    fn steps_that_are_no_reduce_scatter_are_refused() {
        let wrong = |order: &[&[&[u32]]]| steps(&[0, 1, 2, 3], order).is_err();
        let rows: &[&[u32]] = &[&[0, 1], &[2, 3]];
        assert!(wrong(&[rows]));
        assert!(wrong(&[rows, rows]));
        assert!(wrong(&[rows, &[&[0, 1, 2, 3]]]));
        assert!(wrong(&[&[&[0, 1]], rows]));
        // In the second step members with different blocks meet.
        assert!(wrong(&[rows, &[&[0, 3], &[1, 2]]]));
        assert!(wrong(&[&[&[0, 1], &[3, 2]], &[&[0, 2], &[1, 3]]]));
    }

    #[test]
    fn sizes_are_powers_of_two() {
        let steps = Steps { groups: Vec::new(), moves: Vec::new(), sizes: 1 | 1 << 3 };
        assert!([0, 1, 8, 15].iter().all(|&bytes| steps.serve(bytes)));
        assert!([2, 7, 16, u64::MAX].iter().all(|&bytes| !steps.serve(bytes)));
    }
}
