//! `--sizes`: bytes, as nccl-tests writes them.

/// Why a list of sizes cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SizeError {
    #[error("'{0}' is no size: give bytes, or a number with K, M or G (powers of 1024), such as 64K")]
    Size(String),
    #[error("'{0}' is no range: give FIRST:LAST or FIRST:LAST:FACTOR, such as 8:64M or 1K:64M:4")]
    Range(String),
    #[error("in '{0}' the first size is 0 or larger than the last")]
    Order(String),
    #[error("in '{0}' the factor must be a whole number from 2 up")]
    Factor(String),
    #[error("{0} bytes are more than 64G, the most that is measured")]
    TooLarge(u64),
}

const MOST: u64 = 64 << 30;

/// One item of the list: a size, or a range that grows by a factor (2 unless told); FIRST is always in it.
pub(super) fn parse(text: &str) -> Result<Vec<u64>, SizeError> {
    let fields: Vec<&str> = text.split(':').collect();
    match fields.as_slice() {
        [one] => Ok(vec![bytes(one)?]),
        [first, last] => range(text, bytes(first)?, bytes(last)?, 2),
        [first, last, factor] => {
            let factor = factor.trim().parse().ok().filter(|&factor: &u64| factor >= 2);
            range(text, bytes(first)?, bytes(last)?, factor.ok_or_else(|| SizeError::Factor(text.to_owned()))?)
        }
        _ => Err(SizeError::Range(text.to_owned())),
    }
}

fn range(text: &str, first: u64, last: u64, factor: u64) -> Result<Vec<u64>, SizeError> {
    if first == 0 || first > last {
        return Err(SizeError::Order(text.to_owned()));
    }
    Ok(std::iter::successors(Some(first), |size| size.checked_mul(factor)).take_while(|&size| size <= last).collect())
}

fn bytes(text: &str) -> Result<u64, SizeError> {
    let wrong = || SizeError::Size(text.to_owned());
    let upper = text.trim().to_ascii_uppercase();
    let plain = upper.strip_suffix("IB").or_else(|| upper.strip_suffix('B')).unwrap_or(&upper);
    let (digits, shift) = match plain.as_bytes().last() {
        Some(b'K') => (&plain[..plain.len() - 1], 10),
        Some(b'M') => (&plain[..plain.len() - 1], 20),
        Some(b'G') => (&plain[..plain.len() - 1], 30),
        _ => (plain, 0),
    };
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(wrong());
    }
    let size = digits.parse::<u64>().map_err(|_| wrong())?.checked_mul(1 << shift).ok_or(SizeError::TooLarge(u64::MAX));
    size.and_then(|size| if size > MOST { Err(SizeError::TooLarge(size)) } else { Ok(size) })
}

/// `bytes` as a person reads them: whole multiples of 1024 by their suffix.
pub(super) fn display(bytes: u64) -> String {
    for (shift, suffix) in [(30, "G"), (20, "M"), (10, "K")] {
        if bytes != 0 && bytes.trailing_zeros() >= shift {
            return format!("{}{suffix}", bytes >> shift);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reads_what_nccl_tests_reads() {
        assert_eq!(parse("8").unwrap(), [8]);
        assert_eq!(parse("64K").unwrap(), [65536]);
        assert_eq!(parse("1m").unwrap(), [1 << 20]);
        assert_eq!(parse("2GiB").unwrap(), [2 << 30]);
        assert_eq!(parse("3KB").unwrap(), [3072]);
        assert_eq!(parse("0").unwrap(), [0]);
        assert_eq!(parse("8:64").unwrap(), [8, 16, 32, 64]);
        assert_eq!(parse("1K:64K:4").unwrap(), [1024, 4096, 16384, 65536]);
        assert_eq!(parse("8:100:4").unwrap(), [8, 32]);
        assert_eq!(parse("8:64M").unwrap().len(), 24);
    }

    #[test]
    fn says_what_is_wrong() {
        assert_eq!(parse("64X"), Err(SizeError::Size("64X".into())));
        assert_eq!(parse(""), Err(SizeError::Size("".into())));
        assert_eq!(parse("-1"), Err(SizeError::Size("-1".into())));
        assert_eq!(parse("K"), Err(SizeError::Size("K".into())));
        assert_eq!(parse("8:"), Err(SizeError::Size("".into())));
        assert_eq!(parse("64:8"), Err(SizeError::Order("64:8".into())));
        assert_eq!(parse("0:8"), Err(SizeError::Order("0:8".into())));
        assert_eq!(parse("8:64:1"), Err(SizeError::Factor("8:64:1".into())));
        assert_eq!(parse("1:2:3:4"), Err(SizeError::Range("1:2:3:4".into())));
        assert_eq!(parse("65G"), Err(SizeError::TooLarge(65 << 30)));
        assert_eq!(parse("99999999999999G"), Err(SizeError::TooLarge(u64::MAX)));
    }

    proptest! {
        #[test]
        fn what_is_shown_is_read_back(bytes in 0..=MOST) {
            prop_assert_eq!(parse(&display(bytes)).unwrap(), vec![bytes]);
        }

        #[test]
        fn any_text_is_answered(text in ".{0,12}") {
            if let Ok(sizes) = parse(&text) {
                prop_assert!(!sizes.is_empty());
                prop_assert!(sizes.windows(2).all(|pair| pair[0] < pair[1]));
            }
        }
    }
}
