import socket

import pytest

from bert_core.errors import ResourceError
from tracking.store.ports import free_port, free_ports, require_free


def test_a_port_in_use_is_refused_by_the_name_of_who_holds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError) as caught:
            require_free("127.0.0.1", port)
    message = str(caught.value)
    assert message.startswith(f"port {port} on 127.0.0.1 is in use by ")
    assert "(process " in message
    assert message.endswith("stop that process, or choose another port with --port")
    require_free("127.0.0.1", port)


def test_a_host_name_of_another_machine_is_refused() -> None:
    with pytest.raises(ResourceError, match=r"port 8000 on .* Cannot assign requested"):
        require_free("192.0.2.77", 8000)


def test_another_port_is_used_if_the_usual_one_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        taken = held.getsockname()[1]
        assert free_port(taken) != taken
    assert free_port(taken) == taken


def test_free_ports_are_different_ones() -> None:
    assert len(set(free_ports(20))) == 20
