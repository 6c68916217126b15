"""A profile of PipeDream and a graph of dnn-partitioning, small enough to plan by hand."""


def node(name: str, description: str, forward: float, backward: float, size: str, parameters: float) -> str:
    return (
        f"{name} -- {description} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={size}, parameter_size={parameters} -- stage_id=0"
    )


PROFILE = [
    node("n1", "Input0", 0.0, 0.0, "64.0", 0.0),
    node("n2", "Linear(in_features=2, out_features=2)", 1000.0, 2000.0, "[500000000.0; 500000000.0]", 8.0),
    node("n3", "ReLU()", 500.0, 500.0, "1000000000.0", 0.0),
    node("n4", "__getitem__(1)", 0.0, 0.0, "4.0", 0.0),
    node("n5", "Add()", 1000.0, 1000.0, "1.0", 2000000000.0),
    "\tn1 -- n2",
    "\tn2 -- n3",
    "\tn2 -- n4",
    "\tn2 -- n5",
    "\tn3 -- n5",
]

PLACEMENT = {
    "maxFPGAs": 2,
    "maxSizePerFPGA": 100.0,
    "maxCPUs": 0,
    "nodes": [
        {
            "id": 1,
            "fpgaLatency": 1.0,
            "cpuLatency": 10.0,
            "size": 10,
            "isBackwardNode": False,
            "colorClass": 1,
        },
        {
            "id": 2,
            "fpgaLatency": 2.0,
            "cpuLatency": 20.0,
            "size": 20,
            "isBackwardNode": False,
            "colorClass": 2,
        },
        {
            "id": 3,
            "fpgaLatency": 3.0,
            "cpuLatency": 30.0,
            "size": 30,
            "isBackwardNode": True,
            "colorClass": 2,
        },
        {
            "id": 4,
            "fpgaLatency": 4.0,
            "cpuLatency": 40.0,
            "size": 40,
            "isBackwardNode": True,
            "colorClass": 1,
        },
    ],
    "edges": [
        {"sourceId": 1, "destId": 2, "cost": 0.5},
        {"sourceId": 2, "destId": 3, "cost": 9.0},
        {"sourceId": 3, "destId": 4, "cost": 0.25},
    ],
}
