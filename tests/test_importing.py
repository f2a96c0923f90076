"""Imports without the garbage collector: it is off in the block alone, and a block in a block changes nothing."""

import gc

import pytest

from asyncgrpo.host import importing


@pytest.fixture(autouse=True)
def collected():
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_is_off_in_the_block_and_what_was_imported_is_frozen():
    with importing():
        assert not gc.isenabled()
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer block goes on"
    assert gc.isenabled() and gc.get_freeze_count() > 0


def test_the_collector_is_afterwards_as_it_was_also_if_an_import_fails():
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()
