"""What the API's server says about both pools: /afd/topology for programs, /afd for people."""
