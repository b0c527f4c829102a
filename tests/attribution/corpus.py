# ruff: noqa: E501 - lines as programs print them
"""Failures and the rule that each must find. The lines are synthetic: written after the sources and public reports of
PyTorch, NCCL, Gloo, CUDA, Slurm and Linux, with other numbers, names and paths.
"""

from __future__ import annotations

# Rule -> lines that it must find.
FAILURES: dict[str, tuple[str, ...]] = {
    "gpu-ecc": ("RuntimeError: CUDA error: uncorrectable ECC error encountered",),
    "gpu-peer-memory": ("torch.AcceleratorError: CUDA error: invalid access of peer GPU memory over nvlink or a hardware error",),
    "gpu-not-initialized": ("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",),
    "gpu-missing": ("RuntimeError: No CUDA GPUs are available", "RuntimeError: CUDA error: no CUDA-capable device is detected"),
    "gpu-busy": ("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",),
    "gpu-driver": ("Failed to initialize NVML: Driver/library version mismatch",),
    "gpu-xid": ("[1234.5] NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', GPU has fallen off the bus.",),
    "gpu-xid-application": ("[1234.5] NVRM: Xid (PCI:0000:1b:00): 13, pid=4711, Graphics Exception",),
    "nvswitch-fatal": ("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",),
    "pcie-fatal": ("pcieport 0000:40:01.1: AER: Multiple Uncorrected (Fatal) error received",),
    "machine-check": ("mce: [Hardware Error]: CPU 14: Machine Check: 0 Bank 7: dc00000000010092",),
    "nic-health": ("mlx5_core 0000:5e:00.0: poll_health:801: device's health compromised - reached miss count",),
    "kernel-lockup": ("watchdog: BUG: soft lockup - CPU#31 stuck for 26s! [python:4711]",),
    "local-disk": ("blk_update_request: I/O error, dev nvme2n1, sector 2134 op 0x0:(READ)",),
    "host-out-of-memory": ("Out of memory: Killed process 4711 (python) total-vm:91234kB, anon-rss:81234kB",),
    "slurm-memory-error": ("slurmstepd: error: *** STEP 77.0 ON n3 UNCORRECTABLE MEMORY ERROR AT 2026-03-01T10:00:00 ***",),
    "slurm-stepd-stuck": ("slurmstepd: error: *** STEPD TERMINATED ON n3 AT 2026-03-01T10:00:00 DUE TO JOB NOT ENDING WITH SIGNALS ***",),
    "slurm-node-failure": ("slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-03-01T10:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***", "srun: error: Node failure on n3"),
    "python-import": ("ModuleNotFoundError: No module named 'megatron'", "SyntaxError: invalid syntax"),
    "python-import-error": ("ImportError: cannot import name 'Foo' from 'bar' (/w/bar.py)",),
    "arguments": ("train.py: error: unrecognized arguments: --lr-warmup",),
    "settings": ("hydra.errors.ConfigCompositionException: invalid config value 'optimizer'",),
    "shared-library": ("OSError: libcudnn.so.9: cannot open shared object file",),
    "file-missing": ("FileNotFoundError: [Errno 2] No such file or directory: '/data/c4/shard-00017'",),
    "permission": ("PermissionError: [Errno 13] Permission denied: '/data/c4'",),
    "checkpoint-mismatch": ("RuntimeError: Error(s) in loading state_dict for GPT: size mismatch for wte.weight: copying a param with shape",),
    "gpu-out-of-memory": ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 3 has a total capacity of 79.1 GiB",),
    "cgroup-out-of-memory": ("slurmstepd: error: Detected 3 oom_kill events in StepId=77.0. Some of the step tasks have been OOM Killed.", "Memory cgroup out of memory: Killed process 4711 (python)"),
    "data-loader-memory": ("RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.",),
    "data-loader-worker": ("RuntimeError: DataLoader worker (pid(s) 4711, 4712) exited unexpectedly",),
    "device-assert": ("RuntimeError: CUDA error: device-side assert triggered",),
    "collective-mismatch": ("terminate called: [enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4", "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running ALLREDUCE"),
    "duplicate-gpu": ("ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",),
    "not-finite": ("ValueError: loss is NaN at 1200",),
    "disk-full": ("OSError: [Errno 28] No space left on device", "OSError: [Errno 122] Disk quota exceeded"),
    "illegal-access": ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered",),
    "cuda-library": ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
    "native-crash": ("Fatal Python error: Segmentation fault",),
    "watchdog-stuck": ("ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress: heartbeat monitor timed out, watchdog stuck",),
    "nccl-internal": ("torch.distributed.DistBackendError: NCCL error: unhandled cuda error, NCCL version 2.27.3",),
    "checkpoint-torn": ("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory", "EOFError: Ran out of input"),
    "storage-error": ("OSError: [Errno 116] Stale file handle: '/ckpt/step_100'", "OSError: [Errno 5] Input/output error"),
    "storage-away": ("LustreError: 11-0: scratch-OST0004: operation ost_write failed: This client was evicted by scratch-OST0004", "nfs: server 10.1.0.4 not responding, timed out"),
    "blocked-task": ("INFO: task python:4711 blocked for more than 120 seconds.",),
    "service-away": ("requests.exceptions.ConnectionError: HTTPSConnectionPool(host='hub', port=443): Max retries exceeded with url: /m",),
    "ib-retry-exceeded": ("n3:1:2 [0] transport/net_ib.cc:2241 NCCL WARN NET/IB: Got completion from peer 10.0.0.7<4791> with status=12 opcode=1 len=0 vendor err 129",),
    "ib-flushed": ("n3:1:2 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.7<4791> with status=5 opcode=0 len=0 vendor err 249",),
    "ib-port": ("n3:1:2 [0] NCCL WARN NET/IB : mlx5_2:1 Got non-fatal async event: port error(10)",),
    "ib-fatal": ("n3:1:2 [0] NCCL WARN Call to ibv_create_qp failed with error Cannot allocate memory: ibv_create_qp failed",),
    "no-interface": ("n3:1:2 [0] NCCL WARN Bootstrap : no socket interface found",),
    "no-route": ("OSError: [Errno 113] No route to host",),
    "port-taken": ("RuntimeError: The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",),
    "collective-timeout": ("[rank3]:[E301 10:00:00] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.",),
    "watchdog-status": ("[PG ID 0 PG GUID 0 Rank 3] failure detected by watchdog at work sequence id: 88 PG status: last enqueued work: 90, last completed work: 87",),
    "dump-signal": ("[PG ID 0 Rank 3] Observed flight recorder dump signal from another rank via TCPStore.",),
    "watchdog-abort": ("To avoid data inconsistency, we are taking the entire process down.",),
    "nccl-remote": ("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",),
    "gloo-peer": ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.7]:4711", "RuntimeError: Read error [10.0.0.7]:4711: Connection reset by peer"),
    "gloo-timeout": ("RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",),
    "store-gone": ("torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 7/8 clients joined.", "RuntimeError: connectFullMesh failed: timeout"),
    "connect-refused": ("ConnectionRefusedError: [Errno 111] Connection refused",),
    "nccl-after-error": ("RuntimeError: CUDA graph: previous error during capture",),
    "inprocess": ("nvrx_slurm.inprocess.exception.RankDiscarded: rank 0 leaves", "RankDiscarded: rank 0 leaves", "nvrx_slurm.inprocess.store.view.StoreLost: no store", "nvrx_slurm.inprocess.exception.InternalError: one rank could give nothing"),
    "stopped": ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 15",),
    "distributed-error": ("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.",),
    "monitored-barrier": ("RuntimeError: [Rank 0]: Rank 5 failed to pass monitoredBarrier in 1000 ms",),
    "slurm-time-limit": ("slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-03-01T10:00:00 DUE TO TIME LIMIT ***",),
    "slurm-preempted": ("slurmstepd: error: *** STEP 77.0 ON n1 CANCELLED AT 2026-03-01T10:00:00 DUE TO PREEMPTION ***",),
    "slurm-cancelled": ("slurmstepd: error: *** STEP 77.0 ON n1 CANCELLED AT 2026-03-01T10:00:00 ***",),
    "container": ("pyxis: couldn't start container",),
}  # fmt: skip

# What other ranks print because of a failure elsewhere, and what says nothing.
STORM = """\
[rank{r}]:[W301 10:00:01.120 ProcessGroup.cpp:88] Warning: this rank saw nothing special (function operator())
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.7]:4711
[rank{r}]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
connect to 10.0.0.9:29500 failed: Connection refused, retrying in 2 s
OSError: [Errno 5] Input/output error: attempt 1 of 5 for /data/c4/shard-3
[rank{r}]:[E301 10:10:00] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted data.
terminate called after throwing an instance of 'c10::DistBackendError'
"""
