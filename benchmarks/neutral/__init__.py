"""What benchmarks/neutral measures with: others' clients and routers, our engines, small traces."""
