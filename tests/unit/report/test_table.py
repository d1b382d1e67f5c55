"""The table of passes: 100 columns of text, records to iterate over."""

import json
from collections import Counter

import pytest
from golden_files import check_golden

from dtorch.errors import InputError
from dtorch.passes.manager import PassRecord
from dtorch.report.table import PassTable, bytes_text

RECORDS = (
    PassRecord("common_subexpressions", "global", "bitwise", 12, 3.21, 2000, 1988, Counter(), 3 * 2**20),
    PassRecord("a_pass_with_a_name_that_is_much_too_long", "local", "reassociates", 0, 0.04, 10, 10,
               Counter(all_reduce=64, all_gather_into_tensor=2, reduce_scatter_tensor=1), 512),
    PassRecord("round_to_bfloat16", "local", "approximate", 0, 0.0, 10, 10, Counter(all_reduce=64), 512,
               "numerics: approximate is beyond reassociates"),
)  # fmt: skip


def test_the_table_fits_100_columns() -> None:
    table = PassTable(RECORDS, ("capture", "propagate", *(f"local_pass_number_{i}" for i in range(9)), "lower"))
    check_golden("pass_table.txt", str(table) + "\n")
    assert max(map(len, str(table).splitlines())) <= 100
    assert repr(table) == str(table)


def test_it_iterates_over_records_and_finds_one_by_name() -> None:
    table = PassTable(RECORDS)
    assert list(table) == list(RECORDS) and len(table) == 3
    assert table["common_subexpressions"] is table[0]
    with pytest.raises(InputError, match="Nearest: round_to_bfloat16"):
        table["round_to_bfloat"]


def test_its_plain_data_survives_json() -> None:
    plain = json.loads(json.dumps(PassTable(RECORDS).as_dicts()))
    assert plain[1]["collectives"] == {"all_reduce": 64, "all_gather_into_tensor": 2, "reduce_scatter_tensor": 1}
    assert plain[0]["rewrites"] == 12


def test_bytes_have_units() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 3 * 2**20, 5 * 2**30, 2**41)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 GiB", "2.0 TiB"]  # fmt: skip
