//! Which tensors of a call share memory in a way that no schedule allows for, so that they need temporary memory.
//!
//! A call means: everything is read, then everything is written, one output after the other. Schedules write while they
//! still read, and in any order; they are right where inputs and outputs are apart, and where an input is the output in
//! the one place that every algorithm is tested for: see [`Input::own`].

use smallvec::SmallVec;

/// A run of memory, by addresses; `end` is the first byte after it. Empty if it doesn't end after its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Span {
    pub start: usize,
    pub end: usize,
}

impl Span {
    pub fn is_empty(self) -> bool {
        self.end <= self.start
    }

    fn meets(self, other: Span) -> bool {
        self.start < other.end && other.start < self.end && !self.is_empty() && !other.is_empty()
    }

    /// What both have; empty if they don't meet.
    fn common(self, other: Span) -> Span {
        Span { start: self.start.max(other.start), end: self.end.min(other.end) }
    }

    /// The smallest span around both.
    fn hull(self, other: Span) -> Span {
        match (self.is_empty(), other.is_empty()) {
            (true, _) => other,
            (_, true) => self,
            _ => Span { start: self.start.min(other.start), end: self.end.max(other.end) },
        }
    }
}

/// A tensor that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input {
    /// Its memory. Empty if it is read before the call starts.
    pub span: Span,
    pub part: u32,
    /// The rank's own block, if it is the own block of an output of the same part too: the same memory on both sides.
    /// Outputs of the part may meet this input in exactly this memory. Else empty.
    pub own: Span,
}

/// A tensor that is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    /// Its memory, or a hull of it.
    pub span: Span,
    pub part: u32,
    /// It goes through temporary memory in any case, and is written when the call ends.
    pub staged: bool,
}

/// Tensors that need temporary memory, by their number on their side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Conflicts {
    pub inputs: SmallVec<[bool; 8]>,
    pub outputs: SmallVec<[bool; 8]>,
}

/// Nothing can be in conflict, at a look: inputs and outputs lie in different regions, and outputs one after another.
pub(crate) fn apart(inputs: impl Iterator<Item = Span>, outputs: impl Iterator<Item = Span>) -> bool {
    let mut written = Span::default();
    for span in outputs.filter(|span| !span.is_empty()) {
        if !written.is_empty() && span.start < written.end {
            return false;
        }
        written = written.hull(span);
    }
    !inputs.fold(Span::default(), Span::hull).meets(written)
}

/// Decides. Outputs that meet are all staged, to be written in order when the call ends, so that the last one wins.
/// Inputs that meet any other output elsewhere than in their own place are staged.
pub(crate) fn conflicts(inputs: &[Input], outputs: &[Output]) -> Conflicts {
    let mut found = Conflicts {
        inputs: SmallVec::from_elem(false, inputs.len()),
        outputs: SmallVec::from_elem(false, outputs.len()),
    };
    let mut order: SmallVec<[u32; 8]> =
        (0..outputs.len() as u32).filter(|&at| !outputs[at as usize].span.is_empty()).collect();
    order.sort_unstable_by_key(|&at| outputs[at as usize].span.start);
    // The output that reaches farthest so far. One that meets any that starts no later meets this one too, and one that
    // meets any that starts later meets the next one, before which it is the farthest itself or has been found already.
    let mut farthest: Option<u32> = None;
    for &at in &order {
        let end = outputs[at as usize].span.end;
        if let Some(before) = farthest
            && outputs[at as usize].span.start < outputs[before as usize].span.end
        {
            found.outputs[at as usize] = true;
            found.outputs[before as usize] = true;
            if end <= outputs[before as usize].span.end {
                continue;
            }
        }
        farthest = Some(at);
    }
    order.retain(|at| !outputs[*at as usize].staged && !found.outputs[*at as usize]);
    // Those left are disjoint and in order, so that their ends are in order too.
    for (input, staged) in inputs.iter().zip(&mut found.inputs) {
        let first = order.partition_point(|&at| outputs[at as usize].span.end <= input.span.start);
        *staged = order[first..]
            .iter()
            .map(|&at| &outputs[at as usize])
            .take_while(|output| output.span.start < input.span.end)
            .filter(|output| output.span.meets(input.span))
            .any(|output| output.part != input.part || output.span.common(input.span) != input.own);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn span(start: usize, len: usize) -> Span {
        Span { start, end: start + len }
    }

    fn read(start: usize, len: usize) -> Input {
        Input { span: span(start, len), part: 0, own: Span::default() }
    }

    fn written(start: usize, len: usize) -> Output {
        Output { span: span(start, len), part: 0, staged: false }
    }

    fn marks(of: &[bool]) -> Vec<usize> {
        of.iter().enumerate().filter(|(_, mark)| **mark).map(|(at, _)| at).collect()
    }

    #[test]
    fn own_place_needs_nothing() {
        // An all-reduce in place; an all-gather from its own slot; a reduce-scatter into its own block.
        for (input, output, own) in [((8, 4), (8, 4), (8, 4)), ((8, 4), (0, 16), (8, 4)), ((0, 16), (8, 4), (8, 4))] {
            let input = Input { own: span(own.0, own.1), ..read(input.0, input.1) };
            let output = written(output.0, output.1);
            assert!(!apart([input.span].into_iter(), [output.span].into_iter()));
            assert!(marks(&conflicts(&[input], &[output]).inputs).is_empty());
            // Of another part it is a stranger's.
            assert_eq!(marks(&conflicts(&[input], &[Output { part: 1, ..output }]).inputs), [0]);
            // In the same place, which is another's.
            let other = Input { own: Span::default(), ..input };
            assert_eq!(marks(&conflicts(&[other], &[output]).inputs), [0]);
        }
    }

    #[test]
    fn the_same_output_twice_is_staged_and_the_input_is_not() {
        let found = conflicts(&[read(0, 4)], &[written(0, 4), written(0, 4), written(8, 4)]);
        assert_eq!((marks(&found.inputs), marks(&found.outputs)), (vec![], vec![0, 1]));
    }

    #[test]
    fn exchanged_lists_are_staged() {
        let found = conflicts(&[read(0, 4), read(8, 4), read(16, 4)], &[written(8, 4), written(0, 4)]);
        assert_eq!((marks(&found.inputs), marks(&found.outputs)), (vec![0, 1], vec![]));
    }

    /// What the documentation says, pair by pair.
    fn naive(inputs: &[Input], outputs: &[Output]) -> Conflicts {
        let share = |one: Span, other: Span| (one.start..one.end).any(|at| (other.start..other.end).contains(&at));
        let outputs_meet =
            |at: usize| (0..outputs.len()).any(|other| other != at && share(outputs[at].span, outputs[other].span));
        let staged: SmallVec<[bool; 8]> = (0..outputs.len()).map(outputs_meet).collect();
        let in_the_way = |input: &Input, at: usize| {
            let output = &outputs[at];
            let common: Vec<usize> = (input.span.start..input.span.end)
                .filter(|byte| (output.span.start..output.span.end).contains(byte))
                .collect();
            let allowed: Vec<usize> = (input.own.start..input.own.end).collect();
            !output.staged && !staged[at] && !common.is_empty() && (output.part != input.part || common != allowed)
        };
        let inputs = inputs.iter().map(|input| (0..outputs.len()).any(|at| in_the_way(input, at))).collect();
        Conflicts { inputs, outputs: staged }
    }

    fn spans() -> impl Strategy<Value = Span> {
        // Few addresses, so that most things meet something; many of one length, so that they meet exactly.
        (0usize..48, prop_oneof![Just(4usize), 0usize..12]).prop_map(|(start, len)| span(start * 2, len))
    }

    fn inputs() -> impl Strategy<Value = Vec<Input>> {
        let own = prop_oneof![Just(Span::default()), spans()];
        let one = (spans(), 0u32..2, own, any::<bool>()).prop_map(|(span, part, own, whole)| Input {
            span,
            part,
            own: if whole { span } else { own },
        });
        prop::collection::vec(one, 0..6)
    }

    fn outputs() -> impl Strategy<Value = Vec<Output>> {
        let one = (spans(), 0u32..2, any::<bool>()).prop_map(|(span, part, staged)| Output { span, part, staged });
        prop::collection::vec(one, 0..10)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn decides_as_a_look_at_every_pair(mut inputs in inputs(), outputs in outputs()) {
            // Empty spans are equal whatever their address.
            for input in &mut inputs {
                if input.own.is_empty() {
                    input.own = Span::default();
                }
            }
            prop_assert_eq!(conflicts(&inputs, &outputs), naive(&inputs, &outputs));
        }

        #[test]
        fn a_look_overlooks_nothing(inputs in inputs(), outputs in outputs()) {
            let look = apart(inputs.iter().map(|input| input.span), outputs.iter().map(|output| output.span));
            if look {
                let found = naive(&inputs, &outputs);
                prop_assert!(!found.inputs.contains(&true) && !found.outputs.contains(&true));
            }
        }
    }
}
