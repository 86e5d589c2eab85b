//! `strftime` for the formats that chat templates use, in UTC.

const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// Longest result, bytes.
const LENGTH_MAX: usize = 4096;

/// The time `seconds` after 1970 in the given format.
///
/// # Errors
/// Words, where the format has a letter that is not known or makes too much.
pub(super) fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let date = Date::of(days);
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        let mut letter = letters.next().unwrap_or('%');
        // `%-d`: without the leading zero.
        let bare = letter == '-';
        if bare {
            letter = letters.next().unwrap_or('%');
        }
        let padded = |n: u64| {
            if bare {
                n.to_string()
            } else {
                format!("{n:02}")
            }
        };
        let half = if hour % 12 == 0 { 12 } else { hour % 12 };
        out.push_str(&match letter {
            'Y' => date.year.to_string(),
            'y' => padded(date.year % 100),
            'm' => padded(date.month),
            'd' => padded(date.day),
            'H' => padded(hour),
            'I' => padded(half),
            'M' => padded(minute),
            'S' => padded(second),
            'j' if bare => date.of_year.to_string(),
            'j' => format!("{:03}", date.of_year),
            'p' => (if hour < 12 { "AM" } else { "PM" }).to_owned(),
            'B' => name(&MONTHS, date.month - 1).to_owned(),
            'b' | 'h' => name(&MONTHS, date.month - 1).chars().take(3).collect(),
            'A' => name(&DAYS, date.weekday).to_owned(),
            'a' => name(&DAYS, date.weekday).chars().take(3).collect(),
            'F' => format!("{}-{:02}-{:02}", date.year, date.month, date.day),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'z' => "+0000".to_owned(),
            'Z' => "UTC".to_owned(),
            '%' => "%".to_owned(),
            other => return Err(format!("strftime_now does not know %{other}")),
        });
        if out.len() > LENGTH_MAX {
            return Err("strftime_now makes too much".to_owned());
        }
    }
    Ok(out)
}

fn name<const N: usize>(names: &[&'static str; N], index: u64) -> &'static str {
    usize::try_from(index)
        .ok()
        .and_then(|i| names.get(i))
        .copied()
        .unwrap_or("")
}

struct Date {
    year: u64,
    /// From 1.
    month: u64,
    day: u64,
    of_year: u64,
    /// From Sunday, 0.
    weekday: u64,
}

impl Date {
    /// The day so many days after 1970-01-01, by counting (a few thousand steps at most for any
    /// clock before the year 12000).
    fn of(days: u64) -> Self {
        let leap =
            |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
        let length = |y: u64| if leap(y) { 366 } else { 365 };
        // 400 years have a whole number of days, and of weeks.
        let (mut year, mut left) = (1970 + days / 146_097 * 400, days % 146_097);
        while left >= length(year) {
            left -= length(year);
            year += 1;
        }
        let of_year = left + 1;
        let february = if leap(year) { 29 } else { 28 };
        let mut month = 1;
        for days in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
            if left < days {
                break;
            }
            left -= days;
            month += 1;
        }
        Self {
            year,
            month,
            day: left + 1,
            of_year,
            weekday: (days + 4) % 7,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn known_moments_come_out_as_date_1_prints_them() {
        let cases = [
            (0, "1970-01-01 00:00:00 Thursday 001 12 AM"),
            (951_782_400, "2000-02-29 00:00:00 Tuesday 060 12 AM"),
            (1_709_251_199, "2024-02-29 23:59:59 Thursday 060 11 PM"),
            (1_796_135_400, "2026-12-01 14:30:00 Tuesday 335 02 PM"),
            (4_107_542_399, "2100-02-28 23:59:59 Sunday 059 11 PM"),
            (4_107_542_400, "2100-03-01 00:00:00 Monday 060 12 AM"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(
                strftime("%Y-%m-%d %H:%M:%S %A %j %I %p", seconds).as_deref(),
                Ok(expected)
            );
        }
        assert_eq!(
            strftime("%-d %b %y %B %a 100%%", 0).as_deref(),
            Ok("1 Jan 70 January Thu 100%")
        );
    }

    #[test]
    fn an_unknown_letter_is_refused() {
        assert!(strftime("%Q", 0).is_err());
        assert!(strftime(&"%A".repeat(2000), 0).is_err());
    }
}
