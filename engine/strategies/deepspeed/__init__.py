"""DeepSpeed: ZeRO stages 0 to 3 with offload; its engine runs inside our loop."""
