//! StableHLO, as text.

use std::fmt::Write as _;

use super::{Groups, route};
use crate::pjrt::Element;

/// A value of the program: its name and type.
#[derive(Clone)]
pub(super) struct Val {
    pub name: String,
    pub element: Element,
    pub dims: Vec<usize>,
}

impl Val {
    pub fn ty(&self) -> String {
        tensor(self.element, &self.dims)
    }
}

pub(super) fn tensor(element: Element, dims: &[usize]) -> String {
    let mut text = "tensor<".to_owned();
    for dim in dims {
        let _ = write!(text, "{dim}x");
    }
    text + element.mlir() + ">"
}

fn replica_groups(groups: &[Vec<u32>]) -> String {
    let size = groups.first().map_or(0, Vec::len);
    let mut text = "replica_groups = dense<[".to_owned();
    for (index, group) in groups.iter().enumerate() {
        let members: Vec<String> = group.iter().map(u32::to_string).collect();
        let _ = write!(text, "{}[{}]", if index == 0 { "" } else { ", " }, members.join(", "));
    }
    let _ = write!(text, "]> : tensor<{}x{size}xi64>", groups.len());
    text
}

/// The body of `@main` under construction.
pub(super) struct Body<'a> {
    groups: &'a Groups,
    lines: String,
    values: usize,
}

impl<'a> Body<'a> {
    pub fn new(groups: &'a Groups) -> Self {
        Body { groups, lines: String::new(), values: 0 }
    }

    pub fn finish(self) -> String {
        self.lines
    }

    fn put(&mut self, element: Element, dims: &[usize], expression: &str) -> Val {
        let name = format!("%{}", self.values);
        self.values += 1;
        let _ = writeln!(self.lines, "    {name} = {expression}");
        Val { name, element, dims: dims.to_vec() }
    }

    /// `op operands : type` for operations whose operands and result are of one type.
    fn same(&mut self, op: &str, operands: &[&Val]) -> Val {
        let names: Vec<&str> = operands.iter().map(|operand| operand.name.as_str()).collect();
        let expression = format!("stablehlo.{op} {} : {}", names.join(", "), operands[0].ty());
        self.put(operands[0].element, &operands[0].dims, &expression)
    }

    fn to(&mut self, op: &str, from: &Val, element: Element, dims: &[usize]) -> Val {
        let expression = format!("stablehlo.{op} {} : ({}) -> {}", from.name, from.ty(), tensor(element, dims));
        self.put(element, dims, &expression)
    }

    pub fn binary(&mut self, op: &str, a: &Val, b: &Val) -> Val {
        self.same(op, &[a, b])
    }

    pub fn convert(&mut self, from: &Val, element: Element) -> Val {
        if from.element == element { from.clone() } else { self.to("convert", from, element, &from.dims) }
    }

    pub fn reshape(&mut self, from: &Val, dims: &[usize]) -> Val {
        if from.dims == dims { from.clone() } else { self.to("reshape", from, from.element, dims) }
    }

    pub fn constant(&mut self, literal: &str, element: Element, dims: &[usize]) -> Val {
        let expression = format!("stablehlo.constant dense<{literal}> : {}", tensor(element, dims));
        self.put(element, dims, &expression)
    }

    /// A scalar, spread over `dims`.
    pub fn spread(&mut self, scalar: &Val, dims: &[usize]) -> Val {
        let expression = format!(
            "stablehlo.broadcast_in_dim {}, dims = [] : ({}) -> {}",
            scalar.name,
            scalar.ty(),
            tensor(scalar.element, dims)
        );
        self.put(scalar.element, dims, &expression)
    }

    fn replica_groups(&self) -> String {
        replica_groups(&self.groups.groups)
    }

    fn region(combine: &str, element: Element) -> String {
        let scalar = tensor(element, &[]);
        format!(
            "({{\n    ^bb0(%a: {scalar}, %b: {scalar}):\n      %c = stablehlo.{combine} %a, %b : {scalar}\n      \
             stablehlo.return %c : {scalar}\n    }})"
        )
    }

    pub fn all_reduce(&mut self, from: &Val, combine: &str) -> Val {
        let ty = from.ty();
        let text = format!(
            "\"stablehlo.all_reduce\"({}) {} {{{}}} : ({ty}) -> {ty}",
            from.name,
            Self::region(combine, from.element),
            self.replica_groups()
        );
        self.put(from.element, &from.dims, &text)
    }

    /// `[n·k, …]` to `[n, …]` among k members.
    pub fn reduce_scatter(&mut self, from: &Val, combine: &str, groups: &[Vec<u32>]) -> Val {
        let mut dims = from.dims.clone();
        dims[0] /= groups.first().map_or(1, Vec::len);
        let text = format!(
            "\"stablehlo.reduce_scatter\"({}) {} {{scatter_dimension = 0 : i64, {}}} : ({}) -> {}",
            from.name,
            Self::region(combine, from.element),
            replica_groups(groups),
            from.ty(),
            tensor(from.element, &dims)
        );
        self.put(from.element, &dims, &text)
    }

    /// `[1, …]` to `[k, …]`.
    pub fn all_gather(&mut self, from: &Val) -> Val {
        let mut dims = from.dims.clone();
        dims[0] *= self.groups.size();
        let text = format!(
            "\"stablehlo.all_gather\"({}) {{all_gather_dim = 0 : i64, {}}} : ({}) -> {}",
            from.name,
            self.replica_groups(),
            from.ty(),
            tensor(from.element, &dims)
        );
        self.put(from.element, &dims, &text)
    }

    /// `[k, …]`, block j to member j. No channel handle: XLA:CPU refuses one here.
    pub fn all_to_all(&mut self, from: &Val) -> Val {
        let ty = from.ty();
        let text = format!(
            "\"stablehlo.all_to_all\"({}) {{split_dimension = 0 : i64, concat_dimension = 0 : i64, split_count = {} : \
             i64, {}}} : ({ty}) -> {ty}",
            from.name,
            self.groups.size(),
            self.replica_groups()
        );
        self.put(from.element, &from.dims, &text)
    }

    /// Pairs of replicas; who isn't a target gets zeros. No channel handle: with one, XLA:CPU ends the process.
    pub fn permute(&mut self, from: &Val, pairs: &[(u32, u32)]) -> Val {
        let ty = from.ty();
        let list: Vec<String> = pairs.iter().map(|(source, target)| format!("[{source}, {target}]")).collect();
        let text = format!(
            "\"stablehlo.collective_permute\"({}) {{source_target_pairs = dense<[{}]> : tensor<{}x2xi64>}} : ({ty}) -> \
             {ty}",
            from.name,
            list.join(", "),
            pairs.len()
        );
        self.put(from.element, &from.dims, &text)
    }

    /// Over dimension 0: `[k, …]` to `[…]`.
    pub fn reduce(&mut self, from: &Val, combine: &str) -> Val {
        let neutral = self.constant(&route::neutral(combine, from.element), from.element, &[]);
        let text = format!(
            "stablehlo.reduce({} init: {}) applies stablehlo.{combine} across dimensions = [0] : ({}, {}) -> {}",
            from.name,
            neutral.name,
            from.ty(),
            neutral.ty(),
            tensor(from.element, &from.dims[1..])
        );
        self.put(from.element, &from.dims[1..], &text)
    }

    /// Along dimension 0.
    pub fn slice(&mut self, from: &Val, start: usize, end: usize) -> Val {
        let mut dims = from.dims.clone();
        dims[0] = end - start;
        let mut ranges = vec![format!("{start}:{end}")];
        ranges.extend(from.dims[1..].iter().map(|dim| format!("0:{dim}")));
        let text = format!(
            "stablehlo.slice {} [{}] : ({}) -> {}",
            from.name,
            ranges.join(", "),
            from.ty(),
            tensor(from.element, &dims)
        );
        self.put(from.element, &dims, &text)
    }

    /// Along dimension 0.
    pub fn concatenate(&mut self, parts: &[Val]) -> Val {
        let mut dims = parts[0].dims.clone();
        dims[0] = parts.iter().map(|part| part.dims[0]).sum();
        let names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
        let types: Vec<String> = parts.iter().map(Val::ty).collect();
        let text = format!(
            "stablehlo.concatenate {}, dim = 0 : ({}) -> {}",
            names.join(", "),
            types.join(", "),
            tensor(parts[0].element, &dims)
        );
        self.put(parts[0].element, &dims, &text)
    }

    pub fn select(&mut self, condition: &Val, yes: &Val, no: &Val) -> Val {
        let text = format!(
            "stablehlo.select {}, {}, {} : {}, {}",
            condition.name,
            yes.name,
            no.name,
            condition.ty(),
            yes.ty()
        );
        self.put(yes.element, &yes.dims, &text)
    }

    /// `direction` and `how` by StableHLO's names: EQ, NE; UNSIGNED, FLOAT.
    pub fn compare(&mut self, direction: &str, how: &str, a: &Val, b: &Val) -> Val {
        let ty = a.ty();
        let text = format!(
            "stablehlo.compare {direction}, {}, {}, {how} : ({ty}, {ty}) -> {}",
            a.name,
            b.name,
            tensor(Element::Pred, &a.dims)
        );
        self.put(Element::Pred, &a.dims, &text)
    }

    /// `table[replica]`, a scalar.
    pub fn by_replica(&mut self, table: &[u32]) -> Val {
        let id = self.put(Element::U32, &[], "stablehlo.replica_id : tensor<ui32>");
        let list: Vec<String> = table.iter().map(u32::to_string).collect();
        let constant = self.constant(&format!("[{}]", list.join(", ")), Element::U32, &[table.len()]);
        self.entry(&constant, &id)
    }

    /// `start` along dimension 0, zero along the others; with their types.
    fn indices(&mut self, start: &Val, dims: usize) -> (String, String) {
        let zero = (dims > 1).then(|| self.constant("0", start.element, &[]));
        let all: Vec<&Val> = std::iter::once(start).chain(zero.iter().cycle().take(dims - 1)).collect();
        let names: Vec<&str> = all.iter().map(|index| index.name.as_str()).collect();
        let types: Vec<String> = all.iter().map(|index| index.ty()).collect();
        (names.join(", "), types.join(", "))
    }

    /// `step(index, carried)` for each index below `count`, from `start` on: as much code as one of them.
    pub fn repeat(&mut self, count: usize, start: &Val, step: impl FnOnce(&mut Self, &Val, &Val) -> Val) -> Val {
        let number = |body: &mut Self, value: usize| body.constant(&value.to_string(), Element::S32, &[]);
        let zero = number(self, 0);
        if count == 1 {
            return step(self, &zero, start);
        }
        let (one, end) = (number(self, 1), number(self, count));
        let id = self.values;
        self.values += 1;
        let index = Val { name: format!("%i{id}"), ..zero.clone() };
        let carried = Val { name: format!("%c{id}"), ..start.clone() };
        let types = format!("{}, {}", index.ty(), carried.ty());
        let _ = writeln!(
            self.lines,
            "    %{id}:2 = stablehlo.while({} = {}, {} = {}) : {types} cond {{",
            index.name, zero.name, carried.name, start.name
        );
        let more = self.compare("LT", "SIGNED", &index, &end);
        let _ = writeln!(self.lines, "    stablehlo.return {} : {}\n    }} do {{", more.name, more.ty());
        let next = step(self, &index, &carried);
        let after = self.binary("add", &index, &one);
        let _ = writeln!(self.lines, "    stablehlo.return {}, {} : {types}\n    }}", after.name, next.name);
        Val { name: format!("%{id}#1"), ..start.clone() }
    }

    /// `table[index]`, a scalar.
    pub fn entry(&mut self, table: &Val, index: &Val) -> Val {
        let entry = self.dynamic_slice(table, index, 1);
        self.reshape(&entry, &[])
    }

    /// `size` along dimension 0, from `start` on.
    pub fn dynamic_slice(&mut self, from: &Val, start: &Val, size: usize) -> Val {
        let mut dims = from.dims.clone();
        dims[0] = size;
        let (indices, types) = self.indices(start, dims.len());
        let sizes: Vec<String> = dims.iter().map(usize::to_string).collect();
        let text = format!(
            "stablehlo.dynamic_slice {}, {indices}, sizes = [{}] : ({}, {types}) -> {}",
            from.name,
            sizes.join(", "),
            from.ty(),
            tensor(from.element, &dims)
        );
        self.put(from.element, &dims, &text)
    }

    /// Along dimension 0, from `start` on.
    pub fn dynamic_update_slice(&mut self, into: &Val, update: &Val, start: &Val) -> Val {
        let (indices, types) = self.indices(start, into.dims.len());
        let text = format!(
            "stablehlo.dynamic_update_slice {}, {}, {indices} : ({}, {}, {types}) -> {}",
            into.name,
            update.name,
            into.ty(),
            update.ty(),
            into.ty()
        );
        self.put(into.element, &into.dims, &text)
    }
}
