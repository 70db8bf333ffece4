import pytest

from tests.cuda_stub.log import Copy, main, read_log

LOG = """\
t1 stream_create s=1 non-blocking
t1 handle_create cublas
## warm up
t1 malloc bytes=1024
t1 begin_capture s=1 capture=1 mode=global
t1 launch s=1 capture=1 grid=1,1,1 block=64,1,1 void (anonymous namespace)::onnxruntime::Add<float, 4>(int)
t1 library s=1 capture=1 cublasGemmEx m=1 n=2 k=3
t1 copy s=1 capture=1 bytes=8 device->device
t1 end_capture s=1 capture=1 nodes=3
t1 graph_instantiate capture=1 nodes=3
t2 begin_capture s=2 capture=2 mode=global
t2 ERROR 900 in launch (asked for by CUDA_STUB_FAIL_CAPTURE)
t2 end_capture s=2 capture=2 nodes=0 failed
## step
t1 copy_sync s=0 bytes=32 pageable->device
t1 graph_launch s=1 of=1 nodes=3
t1 sync_stream s=1
t1 copy s=1 bytes=4 device->pinned
t1 launch s=1 grid=1,1,1 block=64,1,1 void cub::detail::Sort<int>(int)
## step
"""


def test_a_log_is_read_in_sections():
    before, warm_up, step, _ = read_log(LOG).sections
    assert (before.num_streams_created, before.num_handles_created) == (1, 1)
    assert warm_up.captures == [3]
    assert warm_up.captured_launches == {"Add": 1, "cublasGemmEx": 1}
    assert (warm_up.launches, warm_up.copies, warm_up.num_allocations) == ({}, {}, 1)
    assert warm_up.errors == ["900 in launch (asked for by CUDA_STUB_FAIL_CAPTURE)"]
    assert step.graph_launches == [3]
    assert step.launches == {"Sort": 1}
    assert step.copies == {Copy("H2D", is_synchronous=True): 1, Copy("D2H"): 1}
    assert step.synchronisations == {"stream": 1}
    assert {event.thread for event in warm_up.events} == {1, 2}


def test_a_section_is_found_by_a_name_that_occurs_once():
    log = read_log(LOG)
    assert log["warm up"].captures == [3]
    with pytest.raises(ValueError, match="too many values"):
        log["step"]


def test_the_whole_log_has_the_events_of_all_sections():
    assert len(read_log(LOG).whole.events) == sum(not line.startswith("#") for line in LOG.splitlines())


def test_a_line_of_another_program_is_refused():
    with pytest.raises(ValueError, match="'hello' is not a line"):
        read_log("## a\nhello\n")


def test_the_command_prints_sections_and_fails_where_a_call_failed(tmp_path, capsys):
    path = tmp_path / "log"
    path.write_text(LOG)
    assert main([str(path)]) == 1
    assert "## step\n  graph launches: 1 (1 3 nodes)\n  copies: 2" in capsys.readouterr().out
    path.write_text(LOG.replace("ERROR", "record"))
    assert main([str(path)]) == 0
