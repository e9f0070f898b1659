//! Named values: options in, attributes out.

use std::ffi::c_char;

use super::{
    plugin::text,
    sys::{NamedValue, NamedValueUnion},
};

/// A value of an option or attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Text.
    Text(String),
    /// An integer.
    Int(i64),
    /// Integers.
    Ints(Vec<i64>),
    /// A number.
    Float(f32),
    /// Yes or no.
    Bool(bool),
}

/// Options in the plugin's form; borrows from `options`.
pub(super) fn write_all(options: &[(&str, Value)]) -> Vec<NamedValue> {
    options
        .iter()
        .map(|(name, value)| {
            let (kind, value, value_size) = match value {
                Value::Text(text) => (0, NamedValueUnion { string: text.as_ptr().cast::<c_char>() }, text.len()),
                Value::Int(int) => (1, NamedValueUnion { int64: *int }, 1),
                Value::Ints(ints) => (2, NamedValueUnion { int64_list: ints.as_ptr() }, ints.len()),
                Value::Float(float) => (3, NamedValueUnion { float: *float }, 1),
                Value::Bool(boolean) => (4, NamedValueUnion { boolean: *boolean }, 1),
            };
            NamedValue {
                struct_size: size_of::<NamedValue>(),
                extension_start: std::ptr::null_mut(),
                name: name.as_ptr().cast(),
                name_size: name.len(),
                kind,
                value,
                value_size,
            }
        })
        .collect()
}

/// A plugin's list of named values; kinds that aren't known are left out.
///
/// # Safety
/// `values` is null or points to `count` named values whose strings and lists are alive.
pub(super) unsafe fn read_all(values: *const NamedValue, count: usize) -> Vec<(String, Value)> {
    if values.is_null() {
        return Vec::new();
    }
    // SAFETY: the caller's promise; the union is read as its kind says.
    unsafe { std::slice::from_raw_parts(values, count) }
        .iter()
        .filter_map(|named| unsafe {
            let value = match named.kind {
                0 => Value::Text(text(named.value.string, named.value_size)),
                1 => Value::Int(named.value.int64),
                2 if named.value_size == 0 => Value::Ints(Vec::new()),
                2 => Value::Ints(std::slice::from_raw_parts(named.value.int64_list, named.value_size).to_vec()),
                3 => Value::Float(named.value.float),
                4 => Value::Bool(named.value.boolean),
                _ => return None,
            };
            Some((text(named.name, named.name_size), value))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_round_trip() {
        let options = [
            ("text", Value::Text("yes".into())),
            ("int", Value::Int(-3)),
            ("ints", Value::Ints(vec![2, 2, 1])),
            ("none", Value::Ints(vec![])),
            ("float", Value::Float(0.5)),
            ("bool", Value::Bool(true)),
        ];
        let raw = write_all(&options);
        // SAFETY: written just above, from options that are alive.
        let back = unsafe { read_all(raw.as_ptr(), raw.len()) };
        assert_eq!(back.len(), options.len());
        for ((name, value), (name_back, value_back)) in options.iter().zip(&back) {
            assert_eq!((*name, value), (name_back.as_str(), value_back));
        }
    }
}
