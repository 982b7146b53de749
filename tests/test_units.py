"""Sizes in, sizes out."""

import pytest

from oomph.errors import UserError
from oomph.units import GiB, KiB, MiB, TiB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GiB),
        ("  24gib ", 24 * GiB),
        ("1.5GiB", 3 * GiB // 2),
        (".5MiB", MiB // 2),
        ("512KiB", 512 * KiB),
        ("1TiB", TiB),
        ("80GB", 80 * 10**9),
        ("1.5MB", 1_500_000),
        ("3KB", 3000),
        ("7b", 7),
        (1024, 1024),
    ],
)
def test_a_size_with_a_unit_is_read_exactly(text, size):
    assert parse_bytes(text) == size


def test_a_fraction_of_a_byte_is_dropped_without_a_float_error():
    assert parse_bytes("0.1GiB") == GiB // 10
    assert parse_bytes("9007199254740993B") == 9007199254740993


NONSENSE = ["", "   ", "GiB", "nan", "inf", "nanGiB", "infGiB", "1e3GiB", "1,5GiB", "1 2GiB", "1..5GiB", "x"]


@pytest.mark.parametrize("text", [*NONSENSE, "-1GiB", "-5", "+5GiB", "0", "0GiB", "0.0GiB", "0.4B", "٣GiB"])
def test_what_is_not_a_positive_size_is_refused_in_one_line_with_the_valid_units(text):
    with pytest.raises(UserError) as error:
        parse_bytes(text)
    message = str(error.value)
    assert repr(text.strip()) in message
    assert "KiB MiB GiB TiB" in message
    assert "\n" not in message
    assert error.value.exit_status == 2


@pytest.mark.parametrize("value", [0, -1, True, 1.5, float("nan"), float("inf"), None])
def test_what_is_neither_text_nor_a_positive_whole_number_is_refused(value):
    with pytest.raises(UserError, match="24GiB"):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (KiB, "1.0 KiB"),
        (20 * KiB, "20 KiB"),
        (2 * MiB + MiB // 2, "2.5 MiB"),
        (751 * MiB, "751 MiB"),
        (GiB - 1, "1.00 GiB"),
        (MiB - 1, "1.0 MiB"),
        (GiB, "1.00 GiB"),
        (int(8.389 * GiB), "8.39 GiB"),
        (int(9.999 * GiB), "10.0 GiB"),
        (int(31.4 * GiB), "31.4 GiB"),
        (150109880320, "139.8 GiB"),
        (3 * TiB, "3072.0 GiB"),
        (-12 * MiB, "-12 MiB"),
    ],
)
def test_people_see_sizes_with_sensible_digits(size, text):
    assert format_bytes(size) == text


def test_what_is_printed_can_be_read_back_to_within_the_printed_digits():
    for size in (1, 513, 5 * KiB, 777 * MiB, 3 * GiB, 31 * GiB + 12345, 267 * GiB):
        assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.05)
